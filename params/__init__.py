"""Registered experiments: numbers only."""
