"""Translation quality by language, and the report page of a run."""
