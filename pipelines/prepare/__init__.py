"""Documents to shards: how a source is divided, encoded and written, and when a preparation is whole.

Read in this order: prepare (the whole), parts (how a source is divided), stages (what is done with a part), ray_data (the
same on Ray Data), shards and manifest (what is written), fingerprint (what it depends on).

    prepared = prepare(config, Folder.at("runs"), task)       # raystride.pipelines.prepare.prepare
    prepared.manifest.splits["train"][0].ids_offset           # raystride.pipelines.prepare.manifest, which needs no pyarrow
"""
