"""Reading a compiled program: its instructions, collectives, loops and costs."""
