"""An actor that reserves places for workers, as Ray Train's controller does, in a process that imports little.

held = ray.get(ray.remote(num_cpus=0)(Controller).remote().reserve.remote())
"""


class Controller:
    """As Ray Train's: it reserves places for workers."""

    def reserve(self) -> str:
        """A place's number."""
        import ray
        from ray.util.placement_group import placement_group

        group = placement_group([{"CPU": 1}])
        ray.get(group.ready())
        return str(group.id.hex())
