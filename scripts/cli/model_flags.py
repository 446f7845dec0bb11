"""The flags of the model and of speculation, which mean the same in every script that decodes."""

import argparse
from collections.abc import Callable

from cli import choices, distributed_flags
from cli.parser import Parser
from specjax.checkpoints.load import load
from specjax.models import parallel
from specjax.models.lm import LM
from specjax.models.quantized import KINDS
from specjax.verify import VERIFIERS


def add_model(add: Callable) -> None:
    """The flag of the model."""
    add(
        "--model",
        default="smollm2-135m-instruct",
        help="the default model, a folder, a GGUF file or a hub name (%(default)s)",
    )


def add_all(parser: Parser) -> None:
    """The flags of the model, of speculation, of number formats and of compiled programs."""
    add_model(parser.add_argument)
    choices.add_flags(parser)
    add_speculation(parser.add_argument)
    add_numbers(parser.add_argument)
    parser.add_compilation_cache()


def add_speculation(add: Callable) -> None:
    """The flags of drafting and judging, beside those of :func:`choices.add_flags`."""
    add(
        "--num-speculative-tokens",
        type=int,
        help="K, the most drafted tokens of a round (3 of a trained drafter, else 5)",
    )
    add("--verifier", choices=[name for name, v in VERIFIERS.items() if v.lossless], default="rejection",
        help="who judges drafts (%(default)s)")  # fmt: skip


def add_numbers(add: Callable) -> None:
    """The flags of number formats and devices."""
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights; float32 on a CPU by default")
    add("--quantize", choices=KINDS, help="store the target's weights in eight bits (the draft's: --quantize-draft)")
    add("--kv-dtype", choices=("int8",), help="store the caches in eight bits")
    add("--devices", type=int, default=1, help="GPUs that share the target; each has the whole drafter (%(default)s)")
    add("--data-parallel", type=int, default=1, metavar="N", help="N parts of the GPUs share the rows; each part has "
        "the whole model, cut over its GPUs (%(default)s)")  # fmt: skip
    distributed_flags.add_all(add)


def settle(args: argparse.Namespace) -> None:
    """Settles the drafter and K. Raises ValueError if the flags contradict each other."""
    choices.settle(args)
    distributed_flags.check(args)
    if args.drafter == "none" and args.num_speculative_tokens:
        raise ValueError(
            f"--num-speculative-tokens {args.num_speculative_tokens} is the length of drafts, and --drafter none "
            "drafts nothing; leave one out"
        )
    if args.num_speculative_tokens is None:
        args.num_speculative_tokens = choices.CHOICES[args.drafter].size


def with_drafter(args: argparse.Namespace, name: str) -> argparse.Namespace:
    """Settled arguments for another drafter, with that drafter's default flags. Raises as :func:`settle`."""
    if name not in ("auto", *choices.CHOICES):
        raise ValueError(f"there is no drafter {name!r}; there are {', '.join(choices.CHOICES)}")
    none_given = dict.fromkeys((*choices.FLAGS, *choices.POLICY_FLAGS, "adaptive", "num_speculative_tokens"))
    other = argparse.Namespace(**{**vars(args), **none_given, "drafter": name})
    settle(other)
    return other


def load_model(args: argparse.Namespace) -> LM:
    """The model that the flags name. Raises as ``specjax.load``."""
    mesh = None
    if args.distributed is not None:
        mesh = parallel.mesh(data=args.data_parallel)
    elif not args.devices == args.data_parallel == 1:
        mesh = parallel.mesh(args.devices, args.data_parallel)
    return load(args.model, args.dtype, args.quantize, args.kv_dtype, mesh)
