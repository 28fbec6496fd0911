"""Preparation of data: divides a source into parts, encodes them and writes shards, once for the same data and settings.

Reading order: prepare (the whole), parts (division of a source), stages (processing of a part), ray_data (the same on Ray
Data), shards and manifest (files that are written), fingerprint (inputs of a preparation).

    prepared = prepare(RunContext(config, Folder.from_uri("runs")), task)   # raystride.pipelines.data.prepare.prepare
    prepared.manifest.splits["train"][0].ids_offset           # `manifest` needs no pyarrow
"""
