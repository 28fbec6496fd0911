"""Raw data to shards: where documents come from, how they are cut and written, and when a preparation is whole.

Read in this order: prepare (the whole), sources (what data.source names), parts (how it is divided), stages (what is done
with a part), cluster (the same on Ray Data), shards and manifest (what is written). Own data sets go into registered;
embedded holds those that every machine has.

    prepared = prepare(config, Folder.at("runs"), task)       # pipelines.prepare.prepare
    prepared.manifest.splits["train"][0].ids_offset           # pipelines.prepare.manifest, which needs no pyarrow
"""
