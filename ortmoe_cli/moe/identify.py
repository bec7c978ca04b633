"""From a router to its block: exits proposed by structure, experts and routing told from what the region computes."""

from ortmoe_cli.moe.additions import border
from ortmoe_cli.moe.assemble import Piecewise, assemble, reads_chosen_rows
from ortmoe_cli.moe.block import Block
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.sampling import Sampler
from ortmoe_cli.moe.scene import Scene, routing_tensors, scalars
from ortmoe_cli.moe.trial import Trial


def identify(scene: Scene, sampler: Sampler) -> Block:
    """The block of a scene. Raises Refused, or CutError where the region does not run."""
    samples, hits = sampler.sample()
    width = scene.bench.width
    numbers = scalars(scene.index, scene.region)
    parts = Piecewise(scene.index, scene.cone, scene.region, scene.products, scene.source, numbers)
    assembly = assemble(parts, samples, width, scene.router.experts)
    if (count := len(assembly.experts.members)) < scene.router.experts:
        if count == 1 and not reads_chosen_rows(scene.index, scene.cone, scene.products):
            raise Refused("MOE108", "a single network, which reads more than rows of hidden states that were chosen")
        raise Refused("MOE101", f"{count} of {scene.router.experts} experts are in the file")
    fitting = [
        e for e in scene.exits if samples.per_token(e, width) is not None and samples.first(e).shape[-1] == width
    ]
    if not fitting:
        raise Refused("MOE107", "no tensor behind the router has the shape of the hidden states")
    names, edges = routing_tensors(scene), border(scene.index, scene.cone, scene.region)
    failure: Refused | None = None
    for exit_ in fitting:
        try:
            return Trial(scene, sampler, samples, assembly, hits, exit_, tuple(names), tuple(edges)).block()
        except Refused as reason:
            failure = failure or reason
    assert failure is not None
    raise failure
