"""Who is who in a mesh: places and ranks are inverse, neighbours exchange most, and sets are of all workers."""

from itertools import product

import pytest

from raystride.pipelines.config import ScalingConfig
from raystride.pipelines.train.strategies.mesh.device_mesh import NAMES, Coordinates, Mesh, build_mesh

MESH = Mesh(pipeline=2, replicas=3, shards=2, expert=2, context=2, tensor=2)


def test_workers_stand_in_the_order_of_the_dimensions_tensor_innermost() -> None:
    places = [Coordinates(*numbers) for numbers in product(*map(range, MESH.sizes))]
    assert [MESH.coordinates(rank) for rank in range(MESH.workers)] == places
    assert [MESH.rank(coordinates) for coordinates in places] == list(range(MESH.workers))
    assert MESH.sizes == (2, 3, 2, 2, 2, 2)
    assert (MESH.workers, MESH.groups, MESH.group_workers) == (96, 6, 16)
    assert [MESH.group(Coordinates(1, replica, shard, 1, 1, 1)) for replica in range(3) for shard in range(2)] == list(
        range(6)
    )


@pytest.mark.parametrize(
    "free", [("tensor",), ("pipeline",), ("replicas", "shards"), ("shards", "tensor"), NAMES, ()], ids=str
)
def test_sets_differ_along_the_free_dimensions_alone(free: tuple[str, ...]) -> None:
    sets = list(MESH.groups_along(*free))
    assert sorted(rank for each in sets for rank in each) == list(range(MESH.workers))
    for each in sets:
        assert each == sorted(each)
        places = [MESH.coordinates(rank) for rank in each]
        values = [
            {getattr(coordinates, name) for coordinates in places}
            for name in ("pipeline", "replica", "shard", "expert", "context", "tensor")
        ]
        sizes = [size if name in free else 1 for name, size in zip(NAMES, MESH.sizes, strict=True)]
        assert list(map(len, values)) == sizes


def test_a_mesh_follows_from_settings_and_the_number_of_workers() -> None:
    assert build_mesh(ScalingConfig(tensor=2), 6) == Mesh(replicas=3, tensor=2)
    assert build_mesh(ScalingConfig(pipeline=2, strategy="fsdp"), 6) == Mesh(pipeline=2, shards=3)
    assert build_mesh(ScalingConfig(context=2, strategy="fsdp", shard_workers=2), 8) == Mesh(replicas=2, shards=2, context=2)
    assert build_mesh(ScalingConfig(expert=2, strategy="fsdp"), 4) == Mesh(shards=2, expert=2)
    assert str(build_mesh(ScalingConfig(tensor=2), 6)) == "replicas 3, tensor 2"
    assert str(Mesh()) == "one worker"
    for workers in (1, 3):
        with pytest.raises(ValueError, match=f"{workers} workers cannot be cut into groups of 2"):
            build_mesh(ScalingConfig(tensor=2), workers)
    with pytest.raises(ValueError, match="3 groups of workers cannot be cut into sets of 2"):
        build_mesh(ScalingConfig(tensor=2, strategy="fsdp", shard_workers=2), 6)
