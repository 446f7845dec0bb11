"""Which attention kernel a program gets, by card, shape and the user's choice."""

import jax
import numpy as np
import pytest
from attention_cases import case, in_pages

from specjax.models import attention
from specjax.models.attention import Block

NEEDS_MOSAIC = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU of JAX 0.11 or newer")


@pytest.mark.parametrize(
    "card, has, block, dim, capacity, wanted",
    [
        (9.0, ("mosaic", "triton"), 6, 128, 200, "mosaic"),
        (9.0, ("mosaic",), 1, 64, 64, "mosaic"),
        (9.0, ("mosaic", "triton"), 9, 64, 64, "triton"),
        (9.0, ("mosaic", "triton"), 6, 32, 64, "triton"),
        (9.0, ("mosaic", "triton"), 6, 64, 97, "triton"),
        (8.0, ("mosaic", "triton"), 6, 64, 64, "triton"),
        (10.0, ("mosaic",), 6, 64, 64, "xla"),
        (9.0, ("mosaic",), 6, 32, 64, "xla"),
        (9.0, (), 6, 64, 64, "xla"),
    ],
)
def test_the_kernel_is_chosen_by_card_and_shape_and_a_fallback_is_told(
    monkeypatch, caplog, card, has, block, dim, capacity, wanted
):
    monkeypatch.setattr(attention, "_module", lambda name: "a module" if name in has else None)
    monkeypatch.setattr(attention, "_capability", lambda: card)
    monkeypatch.setenv("SPECJAX_HOPPER_KERNELS", "1")
    attention._log.cache_clear()
    for _ in range(2):
        assert attention.implementation("cuda", block, 4, dim, capacity, False) == wanted
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == (wanted == "xla"), "once"
    assert attention.implementation(None, block, 4, dim, capacity, False) == "xla"
    monkeypatch.delenv("SPECJAX_HOPPER_KERNELS")
    usual = "triton" if "triton" in has else wanted
    assert attention.implementation("cuda", block, 4, dim, capacity, False) == usual, "Triton's comes first"
    monkeypatch.setenv("SPECJAX_HOPPER_KERNELS", "0")
    usual = "triton" if "triton" in has else "xla"
    assert attention.implementation("cuda", block, 4, dim, capacity, False) == usual, "the Hopper kernel is off"
    monkeypatch.setenv("SPECJAX_HOPPER_KERNELS", "on")
    with pytest.raises(ValueError, match="must be 0 or 1, got 'on'"):
        attention.implementation("cuda", block, 4, dim, capacity, False)


@NEEDS_MOSAIC
@pytest.mark.parametrize("masked, paged", [(False, True), (True, False)])
def test_on_a_hopper_card_a_program_gets_the_hopper_kernel(monkeypatch, masked, paged):
    """Compiled for such a card, without one."""
    monkeypatch.setenv("SPECJAX_HOPPER_KERNELS", "1")
    monkeypatch.setattr(attention, "kernels", lambda: "cuda")
    qkv, angles, mask, *buffers, starts = case((77, 5), 6, 2, 4, 64, 1024, masked)
    table = np.arange(1, 33).reshape(2, 16) if paged else None
    buffers = [in_pages(x, table, 33) for x in buffers] if paged else buffers
    block = Block(starts, angles, mask, None, table)
    program = jax.jit(attention.attend, donate_argnums=(2, 3)).trace(qkv, block, *buffers)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2, "attention, and the sums of the parts"
    assert "output_operand_alias" in text, "caches are changed in place"
