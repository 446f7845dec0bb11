"""The roles of one program of the persistent MLP chain. The picture is in kernel.py."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

ROWS = 8  # token rows: the fewest that a wgmma takes


class Program:
    """One program of a :class:`kernel.Chain`. Arrays are references, in the kernel's order; the rest is its scratch."""

    def __init__(self, c, gate_up, down, x, h, y, **scratch):
        self.c, self.v = c, c.v
        self.gate_up, self.down, self.x, self.h, self.y = gate_up, down, x, h, y
        self.__dict__.update(scratch)
        self.up_ring, self.down_ring = self.ring
        self.arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((c.v.halves + 1,)))  # of each half of h, then of x
        self.me = lax.axis_index("program") * c.v.cluster + lax.axis_index("peer")
        self.peers = "peer" if c.v.cluster > 1 else None

    def each_layer(self, layer):
        lax.fori_loop(0, self.c.layers, lambda index, _: layer(index), None)

    def steps(self, count, base, free, slots, load):
        """Calls load(step, slot) for ``count`` steps of a ring, each as soon as its slot is free."""

        def step(i, _):
            at = base + i
            slot = lax.rem(at, slots)

            @pl.when(at >= slots)
            def _():
                plgpu.barrier_wait(free.at[slot])

            load(i, slot)

        lax.fori_loop(0, count, step, None)

    def load_weights(self):
        c, v = self.c, self.v

        def up_boxes(half, index, i):
            for k in (0, 1):  # gate, up
                for at, n in c.boxes(c.up_rows):
                    rows = pl.ds(k * c.f + half * c.span + self.me * c.up_rows + at, n)
                    yield self.gate_up.at[index, rows, pl.ds(i * v.up, v.up)], pl.ds(k * c.up_rows + at, n)

        def down_boxes(half, index, i):
            for place in range(c.places):
                for at, n in c.boxes(c.down_rows):
                    rows = pl.ds(self.me * c.down_rows + at, n)
                    source = self.down.at[index, rows, c.down_columns(half, place, i)]
                    yield source, pl.ds(place * c.down_rows + at, n)

        ups = [(functools.partial(up_boxes, half), c.up_steps, 0) for half in range(v.halves)]
        downs = [(functools.partial(down_boxes, half), c.down_steps, 1) for half in range(v.halves)]
        phases = [*ups, *downs, *ups[:1]]

        def layer(index):
            base = index * c.layer_steps
            for k in range(len(phases) - 1):
                load = functools.partial(self.load_step, phases[k : k + 2], index, k == len(phases) - 2)
                self.steps(phases[k][1], base, self.free, v.slots, load)
                base += phases[k][1]

        self.each_layer(layer)

    def load_step(self, phases, index, last, i, slot):
        """Loads step i of the first of two phases, and calls the step ``ahead`` of it into the second-level cache."""
        (boxes, count, kind), (next_boxes, *_) = phases
        ring, ahead = (self.up_ring, self.down_ring)[kind], i + self.v.ahead
        for source, rows in boxes(index, i):
            plgpu.copy_gmem_to_smem(source, ring.at[slot, rows], self.full[kind].at[slot])

        def prefetch(boxes, index, i):
            for source, _ in boxes(index, i):
                plgpu.async_prefetch(source)

        if self.v.ahead:
            following = (ahead >= count) & (index + last < self.c.layers)
            pl.when(ahead < count)(lambda: prefetch(boxes, index, ahead))
            pl.when(following)(lambda: prefetch(next_boxes, index + last, ahead - count))

    def load_inputs(self):
        c, v = self.c, self.v

        def copy(source, target, full):
            plgpu.copy_gmem_to_smem(source, target, full, collective_axes=self.peers)

        def load_up(source, i, slot):
            columns = pl.ds(lax.rem(i, c.up_steps) * v.up, v.up)
            copy(source.at[:, columns], self.up_inputs.at[slot], self.inputs_full[0].at[slot])

        def load_down(half, i, slot):
            for place in range(c.places):
                target = self.down_inputs.at[slot, pl.ds(place * ROWS, ROWS)]
                copy(self.h.at[:, c.down_columns(half, place, i)], target, self.inputs_full[1].at[slot])

        def layer(index):
            base, ups = index * c.layer_steps, v.halves * c.up_steps
            ring = self.inputs_free, v.inputs

            @pl.when(index == 0)
            def _():
                self.steps(ups, base, *ring, functools.partial(load_up, self.x))

            @pl.when(index > 0)
            def _():
                self.wait_for_all(v.halves, index)
                self.steps(ups, base, *ring, functools.partial(load_up, self.y))

            for half in range(v.halves):
                self.wait_for_all(half, index + 1)
                at = base + ups + half * c.down_steps
                self.steps(c.down_steps, at, *ring, functools.partial(load_down, half))

        self.each_layer(layer)

    def wait_for_all(self, which, times):
        """The barrier ``which`` for the ``times``th time: every program has published. Counters never go back."""
        if self.v.mode == "full":
            count = times * self.v.programs
            plgpu.semaphore_wait(self.arrived.at[which], count, decrement=False, memory_scope="gpu")
            if self.v.direct:
                plgpu.inline_mgpu()(lambda _: _fence())()

    def compute(self):
        plgpu.copy_gmem_to_smem(self.x.at[:, pl.ds(self.me * self.c.down_rows, 64)], self.mine, self.once)
        plgpu.barrier_wait(self.once)

        def layer(index):
            for half in range(self.v.halves):
                self.up_half(index, half)
            self.down_all(index)

        self.each_layer(layer)
        if self.v.cluster > 1:  # no program leaves while a peer may still signal it
            plgpu.barrier_arrive(self.done)
            plgpu.barrier_wait(self.done)

    def products(self, accs, count, base, phase, multiply):
        """The sums of ``count`` ring steps: multiply(slot, inputs' slot) adds one step's products to ``accs``."""
        v = self.v

        def release(at):
            plgpu.barrier_arrive(self.free.at[lax.rem(at, v.slots)])
            plgpu.barrier_arrive(self.inputs_free.at[lax.rem(at, v.inputs)])

        def step(i, _):
            at = base + i
            slot, inputs_slot = lax.rem(at, v.slots), lax.rem(at, v.inputs)
            plgpu.barrier_wait(self.full[phase].at[slot])
            if v.mode == "stream":
                plgpu.barrier_arrive(self.free.at[slot])
                return
            plgpu.barrier_wait(self.inputs_full[phase].at[inputs_slot])
            multiply(slot, inputs_slot)
            plgpu.wgmma_wait(v.flight * len(accs))
            pl.when(i >= v.flight)(lambda: release(at - v.flight))

        lax.fori_loop(0, count, step, None)
        if v.mode == "stream":
            return [plgpu.layout_cast(jnp.zeros(acc.shape, jnp.float32), plgpu.Layout.WGMMA) for acc in accs]
        plgpu.wgmma_wait(0)
        for k in range(v.flight):
            release(base + count - v.flight + k)
        return [acc[...] for acc in accs]

    def up_half(self, index, half):
        c = self.c

        def run(*accs):
            def multiply(slot, inputs_slot):
                for b, acc in enumerate(accs):
                    plgpu.wgmma(acc, self.up_ring.at[slot, pl.ds(64 * b, 64)], self.up_inputs.at[inputs_slot].T)

            return self.products(accs, c.up_steps, index * c.layer_steps + half * c.up_steps, 0, multiply)

        # Gate and up of one column lie in different threads, so they meet in shared memory.
        for b, sums in enumerate(pl.run_scoped(run, *[plgpu.ACC((64, ROWS), jnp.float32)] * c.blocks)):
            self.sums[pl.ds(64 * b, 64)] = sums
        for b in range(c.outs):
            gate, up = self.summed(64 * b), self.summed(c.up_rows + 64 * b)
            columns = pl.ds(half * c.span + self.me * c.up_rows + 64 * b, min(64, c.up_rows - 64 * b))
            which = half if b == c.outs - 1 else None
            self.publish(gate / (1.0 + jnp.exp(-gate)) * up, self.staged[b], self.h.at[:, columns], which)

    def down_all(self, index):
        c, v = self.c, self.v

        def run(acc):
            def multiply(slot, inputs_slot):
                plgpu.wgmma(acc, self.down_ring.at[slot, pl.ds(0, 64)], self.down_inputs.at[inputs_slot].T)

            base = index * c.layer_steps + v.halves * c.up_steps
            return self.products([acc], v.halves * c.down_steps, base, 1, multiply)

        (acc,) = pl.run_scoped(run, plgpu.ACC((64, c.places * ROWS), jnp.float32))
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (64, ROWS), 0), plgpu.Layout.WGMMA)
        diagonal = acc[:, :ROWS]
        for place in range(1, c.places):
            diagonal = jnp.where(row >= place * c.down_rows, acc[:, place * ROWS : (place + 1) * ROWS], diagonal)
        for twice in (0, 64):  # so that 64 rows can be read from the first row of any place
            self.sums[pl.ds(twice, 64)] = diagonal
        y = plgpu.load(self.mine.T, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        for place in range(c.places):
            y += self.summed(place * c.down_rows)
        if v.direct:
            self.mine.T[...] = y.astype(jnp.bfloat16)
        columns = pl.ds(self.me * c.down_rows, c.down_rows)
        self.publish(y, self.mine, self.y.at[:, columns], v.halves)

    def summed(self, at):
        return plgpu.load(self.sums.at[pl.ds(at, 64)], layout=plgpu.Layout.WGMMA, optimized=False)

    def publish(self, value, staged, target, which):
        """Writes f32[64, 8], cut to the columns of ``target``, to global memory, and signals barrier ``which``."""
        if self.v.direct:
            store = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
            store(functools.partial(_store, target.shape[1]))(target, value.astype(jnp.bfloat16))
        else:
            staged.T[...] = value.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[:, pl.ds(0, target.shape[1])], target)
            plgpu.wait_smem_to_gmem(0)
        if which is not None:
            plgpu.semaphore_signal(self.arrived.at[which], 1, memory_scope="gpu")


def _store(columns, _, target, value):
    """target[column, row] = value[row, column] for the first rows."""

    def element(x, index):
        row, column = index
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(columns, ir.IndexType.get()))):
            memref.store(x, target, [column, row])

    value.foreach(element)
    _fence()


def _fence():
    """Orders plain stores and loads before and after those of the copy engine, which reads what was published."""
    mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
