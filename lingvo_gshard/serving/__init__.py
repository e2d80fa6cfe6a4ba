"""Translations and continuations over HTTP."""
