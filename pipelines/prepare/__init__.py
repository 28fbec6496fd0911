"""Raw data to shards: where documents come from, how they are cut and written, and when a preparation is whole."""
