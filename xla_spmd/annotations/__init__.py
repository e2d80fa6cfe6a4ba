"""Shardy's annotations in place of GSPMD's, in an exported program."""
