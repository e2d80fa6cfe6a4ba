"""Tables of many compiled programs: the paper's and others'; `report` writes the text."""
