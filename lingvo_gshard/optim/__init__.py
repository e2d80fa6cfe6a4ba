"""Adafactor and learning-rate schedules."""
