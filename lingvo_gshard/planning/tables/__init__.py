"""Tables of many compiled programs: the paper's, machines, searches; `report` writes the text."""
