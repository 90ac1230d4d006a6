"""Writes tests/parallel_state/device_mesh_golden.json and dtensor_golden.json: the results of
PyTorch's DeviceMesh and DTensor for meshes, placements and tensors that follow from a formula. The
tests make the same tensors by the same formula.

Run it with torch 2.11: python scripts/golden/dtensor.py
"""

import itertools
import json
import math
import pathlib
import random
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

FOLDER = pathlib.Path(__file__).parents[2] / "tests/parallel_state"
PLAIN_VALUES = 6  # larger tensors are stored as sums

MESHES = [  # world, ranks as a nested list, names
    (8, torch.arange(8).view(2, 4), ("dp", "tp")),
    (8, torch.arange(8).view(2, 2, 2), ("dp", "cp", "tp")),
    (24, torch.arange(24).view(2, 3, 4), ("a", "b", "c")),
    (8, torch.arange(4, 8).view(2, 2), ("dp", "tp")),
    (6, torch.tensor([[5, 0, 3], [2, 4, 1]]), ("x", "y")),
    (6, torch.arange(6).view(3, 1, 2), ("dp", "one", "tp")),
]


def mesh_case(world, ranks, names):
    """Returns every rank's coordinate, and its slice along every selection of axes in every order.
    PyTorch slices in ascending order only; the other orders permute the axes of that slice."""
    views = []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        coordinate = mesh.get_coordinate()
        view = {"rank": rank, "coordinate": None if coordinate is None else list(coordinate),
                "slices": {}}
        for count in range(1, len(names) + 1) if coordinate is not None else ():
            for axes in itertools.permutations(range(len(names)), count):
                ascending = tuple(sorted(axes))
                part = mesh[tuple(names[i] for i in ascending)]
                turned = part.mesh.permute([ascending.index(i) for i in axes])
                if axes == ascending:
                    flat = part._flatten("_".join(names[i] for i in axes) + "_flat")
                    assert flat.mesh.tolist() == turned.flatten().tolist()
                view["slices"][",".join(names[i] for i in axes)] = turned.flatten().tolist()
        views.append(view)
        dist.destroy_process_group()
    return {"shape": list(ranks.shape), "names": names, "ranks": ranks.flatten().tolist(),
            "views": views}


def term(shape, ordinal):
    """The tensor that the rank at place `ordinal` of the Partial axes contributes: multiples of 24,
    so that means and sums over up to 8 ranks are exact."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return (24 * ((i * 7 + i * i + 13 * ordinal) % 41 - 20)).reshape(shape)


def numbers_of(tensor):
    """Returns few values as they are, and many as sums that change if two values are swapped."""
    flat = tensor.contiguous().flatten()
    if flat.numel() <= PLAIN_VALUES:
        return [int(v) for v in flat]
    i = torch.arange(flat.numel(), dtype=torch.float64)
    return [int(flat.sum()), int((flat * (i + 1)).sum()),
            int((flat * ((i * i * 31 + i * 17 + 5) % 101)).sum())]


def is_partial(placement):
    return isinstance(placement, Partial)


def source_tensor(mesh, shape, placements):
    ordinal = 0
    for axis, placement in enumerate(placements):
        if is_partial(placement):
            ordinal = ordinal * mesh.size(axis) + mesh.get_local_rank(axis)
    full = term(shape, ordinal)
    shards = [Replicate() if is_partial(p) else p for p in placements]
    local = distribute_tensor(full, mesh, shards, src_data_rank=None).to_local()
    return DTensor.from_local(local, mesh, placements, shape=full.size(), stride=full.stride())


def expected_full(mesh, shape, placements):
    """Computes the full tensor of `placements` without DTensor."""
    axes = [a for a, p in enumerate(placements) if is_partial(p)]
    terms = torch.stack([term(shape, k) for k in range(math.prod(mesh.size(a) for a in axes))])
    terms = terms.reshape([mesh.size(a) for a in axes] + list(shape))
    for axis in axes:
        op = placements[axis].reduce_op
        terms = {"sum": terms.sum, "avg": terms.mean, "max": terms.amax, "min": terms.amin}[op](0)
    return terms


def run_rank(rank, world, folder, cases, results):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    meshes, mine = {}, []
    for mesh_shape, shape, source, target in cases:
        if mesh_shape not in meshes:
            names = tuple(f"a{i}" for i in range(len(mesh_shape)))
            meshes[mesh_shape] = DeviceMesh("cpu", torch.arange(world).view(mesh_shape),
                                            mesh_dim_names=names)
        mesh = meshes[mesh_shape]
        result = source_tensor(mesh, shape, source).redistribute(mesh, target)
        assert torch.equal(result.full_tensor(), expected_full(mesh, shape, source)), \
            (mesh_shape, shape, source, target)
        local = result.to_local()
        size, offset = compute_local_shape_and_global_offset(shape, mesh, result.placements)
        assert size == local.shape
        mine.append([list(size), list(offset), numbers_of(local)])
    results[rank] = mine
    dist.destroy_process_group()


def all_cases():
    chosen = random.Random(4)
    sum_, avg, max_, min_ = Partial("sum"), Partial("avg"), Partial("max"), Partial("min")
    cases = []
    for n in (2, 3, 4, 6, 8):  # one axis: every pair, for even, uneven, short and empty tensors
        for shape in ((2 * n, n), (n + 1, 2 * n - 1), (n - 1, 5), (0, 3)):
            pairs = [(s, t) for s in (Replicate(), Shard(0), Shard(1), sum_)
                     for t in (Replicate(), Shard(0), Shard(1)) if s != t]
            pairs += [(chosen.choice((avg, max_, min_)), t)
                      for t in (Replicate(), Shard(0), Shard(-1))]
            cases += [((n,), shape, (s,), (t,)) for s, t in pairs]
    for mesh, count in (((2, 2), 40), ((2, 3), 40), ((3, 2), 40), ((2, 4), 30), ((2, 2, 2), 60)):
        shapes = ((6, 8), (7, 5), (3, 9), (1, 4), (5,), (4, 3, 5))
        drawn = set()
        while len(drawn) < count:
            shape = chosen.choice(shapes)
            shards = [Shard(d) for d in range(-1, len(shape))]
            op = chosen.choice((sum_, sum_, avg, max_, min_))
            source = tuple(chosen.choice([Replicate(), op, *shards]) for _ in mesh)
            target = tuple(chosen.choice([Replicate(), *shards]) for _ in mesh)
            if source != target:
                drawn.add((mesh, shape, source, target))
        cases += sorted(drawn, key=str)
    return cases


def describe(placements):
    return [f"S{p.dim}" if isinstance(p, Shard) else "R" if isinstance(p, Replicate)
            else p.reduce_op for p in placements]


def dtensor_cases():
    written = []
    by_world = {}
    for case in all_cases():
        by_world.setdefault(math.prod(case[0]), []).append(case)
    for world, cases in by_world.items():
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            results = manager.dict()
            mp.start_processes(run_rank, (world, folder, cases, results), world,
                               start_method="fork")
            for i, (mesh, shape, source, target) in enumerate(cases):
                written.append({"mesh": mesh, "shape": shape, "from": describe(source),
                                "to": describe(target),
                                "local": [results[rank][i] for rank in range(world)]})
    return written


def write(name, entries):
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    (FOLDER / name).write_text(f"[\n{lines}\n]\n")
    print(FOLDER / name, len(entries), "cases")


if __name__ == "__main__":
    write("device_mesh_golden.json", [mesh_case(*case) for case in MESHES])
    write("dtensor_golden.json", dtensor_cases())
