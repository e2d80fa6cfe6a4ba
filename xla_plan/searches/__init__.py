"""Tables from letters to mesh axes, tried for a program."""
