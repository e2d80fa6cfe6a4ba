"""Rates that were measured on one device, and the time that they give a plan."""
