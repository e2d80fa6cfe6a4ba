"""A prepared folder for tests."""

from data_prep import engines, pipeline, source_tables
from lingvo_gshard.input import manifest


def build(input_dir, out_dir, config, num_workers=1):
    """Prepares a folder of TSV files, or of text, and returns the manifest."""
    found = source_tables.FOLDERS[manifest.Kind(config.kind)](input_dir)
    pipeline.run_through(pipeline.Step.REPORT, found, out_dir, config, engines.pool(num_workers))
    return manifest.load(out_dir)
