"""Shares of their bounds that published steps reach, by machine."""
