"""A run's context: where its data is, and whether that is complete."""

from dataclasses import replace
from pathlib import Path

from raystride.pipelines.data.prepare.fingerprint import KeptPreparations, identity
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.system.storage.folder import Folder
from tests.tiny import tiny, write_text


def test_data_is_prepared_once_its_manifest_is_there_or_that_of_the_kept_preparation(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path))
    concurrent = replace(config, run="a", data=replace(config.data, start_after_mib=1.0))
    context = RunContext(concurrent, Folder(str(tmp_path / "runs")), log=lambda _: None)
    assert str(context.run_folder) == str(tmp_path / "runs" / "a")
    assert not context.is_prepared
    prepared = prepare(context, context.task, on_ray=False)
    assert prepared.identity == context.identity()
    assert str(context.prepared_folder) == str(prepared.folder)
    assert context.identity().data == identity(concurrent, context.task).data
    assert context.is_prepared
    assert not context.with_config(config).is_prepared, "a training that waits for all data asks nobody"
    kept = replace(context, kept=KeptPreparations(fingerprints={"": "0" * 16}))
    assert str(kept.prepared_folder) == str(context.storage / ".prepared" / ("0" * 16))
    assert not kept.is_prepared
