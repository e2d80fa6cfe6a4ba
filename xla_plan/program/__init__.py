"""Reads programs that others wrote: their arguments, letters and roles."""
