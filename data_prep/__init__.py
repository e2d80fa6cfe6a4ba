"""Offline preparation: parallel text to records, vocabularies and a manifest."""
