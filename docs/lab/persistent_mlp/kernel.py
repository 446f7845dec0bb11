"""A chain of MLPs as ONE persistent kernel (Pallas Mosaic GPU, Hopper, jax 0.11). See ../persistent-mlp.md.

    x = x + down(silu(gate(x)) * up(x)), layer after layer; x is bf16[8, D], gate and up are one weight [2F, D].

Each of the 128 programs owns the same share of every weight's rows, so a sum never leaves its program and has one
order. A program has three roles (program.py), and a ring in shared memory between each loader and the products:

    weights' warp   TMA >>> [slot][slot][slot][slot] >>> products (a warpgroup)     runs ahead ACROSS the barriers
    inputs' warp    TMA >>> [slot][slot]             >>> the same                   waits at the barriers

    phase       up, first half   up, second half   down                  up, first half   ...   (of the next layer)
    reads       x                x                 h first, h second     x
    publishes   h first half     h second half     x
    barrier                                        ^ first  ^ second     ^ x

A barrier is a counter in global memory: every program adds one when its part is published, and the inputs' warp waits
for all. The barrier of the first half of h is passed while the second half is still computed, so nobody waits there.

A wgmma takes 64 rows of a weight and 8 token rows. A program owns only 16 rows of down (D = 2048), so its slot holds
these rows at 4 places of their columns, one below the other, and the inputs' slot holds the 4 matching places of h. Of
the product [64, 32] only the diagonal blocks count, and they are added up:

    rows of the weight x inputs   place 0  place 1  place 2  place 3
    place 0                       SUM
    place 1                                SUM
    place 2                                         SUM
    place 3                                                  SUM
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from program import ROWS, Program

TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a sweep varies."""

    mode: str = "full"  # stream: no products; free: products, but no waiting at barriers (wrong results); full
    up: int = 128  # columns of a slot in the up phase
    down: int = 128  # columns of a place in a slot in the down phase
    slots: int = 11  # of the weights' ring
    ahead: int = 0  # steps by which weights are called into the second-level cache before they are loaded
    inputs: int = 4  # slots of the inputs' ring
    flight: int = 1  # slots whose products may be unfinished when the next slot's begin
    box: int = 0  # rows of a TMA box; 0: as many as fit together
    warps: bool = True  # the loaders are two warps of one warpgroup, not a warpgroup each
    programs: int = 128
    halves: int = 2  # 1: the up phase publishes once
    direct: bool = True  # results go from registers to global memory, not by way of shared memory
    cluster: int = 1  # programs that share the loads of inputs, by multicast


class Chain:
    """The kernel of one variant for L layers of weights [2F, D] and [D, F]."""

    def __init__(self, v: Variant, layers: int, d: int, f: int):
        self.v, self.layers, self.d, self.f = v, layers, d, f
        self.span = f // v.halves  # intermediate columns of a half of the up phase
        self.up_rows, self.down_rows = self.span // v.programs, d // v.programs  # of a program: of gate in a half
        self.outs = -(-self.up_rows // 64)  # blocks of 64 intermediate columns that a program makes in a half
        self.blocks = -(-2 * self.up_rows // 64)  # wgmma blocks that hold a half's gate rows, then its up rows
        self.places = 64 // self.down_rows
        self.up_steps = d // v.up  # ring steps of a half of the up phase
        self.down_steps = self.span // self.places // v.down  # ring steps for a half of h
        self.layer_steps = v.halves * (self.up_steps + self.down_steps)
        assert self.up_steps * v.up == d and self.down_steps * v.down * self.places == self.span
        assert self.down_rows * self.places == 64 and self.up_rows * v.programs == self.span
        assert max(v.flight, v.ahead) <= min(self.up_steps, self.down_steps) and v.flight < min(v.slots, v.inputs)

    def __call__(self, gate_up, down, x):
        """gate_up bf16[L, 2F, D], down bf16[L, D, F], x bf16[8, D] -> bf16[8, D]."""
        v = self.v
        shapes = [jax.ShapeDtypeStruct((ROWS, n), jnp.bfloat16) for n in (self.f, self.d)]
        return plgpu.kernel(
            functools.partial(_body, self),
            out_type=shapes,
            scratch_types=self.scratch(),
            grid=(v.programs // v.cluster,),
            grid_names=("program",),
            cluster=(v.cluster,),
            cluster_names=("peer",),
            num_threads=2 if v.warps else 3,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="mlp_chain",
        )(gate_up, down, x)[1]

    def scratch(self) -> dict:
        v = self.v
        size = max(64 * self.blocks * v.up, 64 * v.down)  # elements of a slot

        def smem(*shape, dtype=jnp.bfloat16, transforms=TILE):
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        def barriers(n, arrivals=1):
            return plgpu.Barrier(num_barriers=n, num_arrivals=arrivals)

        def shared(n):
            return barriers(n) if v.cluster == 1 else plgpu.ClusterBarrier(num_barriers=n, collective_axes=("peer",))

        return dict(
            ring=plgpu.RefUnion(smem(v.slots, size // v.up, v.up), smem(v.slots, size // v.down, v.down)),
            up_inputs=smem(v.inputs, ROWS, v.up),
            down_inputs=smem(v.inputs, ROWS * self.places, v.down) if v.mode != "stream" else smem(1, ROWS, 64),
            staged=[smem(ROWS, 64, transforms=()) for _ in range(self.outs)],
            mine=smem(ROWS, 64, transforms=()),  # the program's own columns of x
            sums=smem(max(128, 64 * self.blocks), ROWS, dtype=jnp.float32, transforms=()),
            full=(
                barriers(v.slots, 2 * len(self.boxes(self.up_rows))),
                barriers(v.slots, self.places * len(self.boxes(self.down_rows))),
            ),
            free=barriers(v.slots),
            inputs_full=(barriers(v.inputs), barriers(v.inputs, self.places)),
            inputs_free=shared(v.inputs),
            once=plgpu.Barrier(),
            done=shared(()),
        )

    def boxes(self, rows):
        box = min(rows, self.v.box or rows)
        return [(at, box) for at in range(0, rows, box)]

    def down_columns(self, half, place, i):
        return pl.ds(half * self.span + place * (self.span // self.places) + i * self.v.down, self.v.down)


def _body(c, gate_up, down, x, h, y, **scratch):
    p = Program(c, gate_up, down, x, h, y, **scratch)
    group, loads_inputs = lax.axis_index("group"), c.v.mode != "stream"

    @pl.when(group == 0)
    def _():
        plgpu.set_max_registers(232, action="increase")
        p.compute()

    def loader(n, roles):
        @pl.when(group == n)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            roles()

    def in_warps():
        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            warp = lax.axis_index("warp")
            pl.when(warp == 0)(p.load_weights)
            if loads_inputs:
                pl.when(warp == 1)(p.load_inputs)

    if c.v.warps:
        loader(1, in_warps)
    else:
        loader(1, p.load_weights)
        if loads_inputs:
            loader(2, p.load_inputs)
