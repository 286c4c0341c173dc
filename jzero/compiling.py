"""Compiling for GPUs that are not there: what XLA has made, and why it could not."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jzero import hlo
from jzero.buffers import DUMP, Buffer, temporaries


class Unsupported(RuntimeError):
    """The step uses something that cannot be compiled without the GPU."""


def compile_for(
    target: str, lower: Callable[[], jax.stages.Lowered]
) -> tuple[jax.stages.Lowered, jax.stages.Compiled, hlo.Program, tuple[Buffer, ...] | None]:
    """Lowers and compiles a program.

    Args:
        target: The GPUs, for messages.
        lower: Traces it on a mesh of these.

    Returns:
        It lowered, compiled, and its text; what takes its temporary memory, None where XLA does not say.

    Raises:
        Unsupported: It calls a library of NVIDIA's that is not here.
        RuntimeError: XLA refuses it.
    """
    with _reasons(target):
        lowered = lower()
        with tempfile.TemporaryDirectory(prefix="jzero-preflight-") as folder:
            compiled = lowered.compile(compiler_options=DUMP | {"xla_dump_to": folder})
            program = hlo.parse(compiled.as_text() or "")
            return lowered, compiled, program, temporaries(Path(folder), program)


@contextlib.contextmanager
def _reasons(target: str) -> Iterator[None]:
    """Says of what cannot be compiled here why, and what to do."""
    logger = logging.getLogger("jax_plugins")  # it says that there is no CUDA, which is no news
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "cuDNN is not detected" in said:
            raise Unsupported(
                f"The step asks for cuDNN's attention, which cannot be compiled without cuDNN ({said}). For preflight "
                f"pass implementation='xla' to jax.nn.dot_product_attention, or None: all else is the same, but the "
                f"scores of attention then take memory, and their matmuls run apart."
            ) from error
        if "No FFI handler registered for cu" in said:
            call = said.partition("registered for ")[2].partition(" ")[0]
            raise Unsupported(
                f"The step calls {call}, which is in a library of NVIDIA's that is not here: decompositions of "
                f"matrices (cholesky, qr, svd, eigh) cannot be compiled for {target} without it. For preflight leave "
                f"that part out, or choose an optimizer that does without, such as one with Newton-Schulz iterations "
                f"(optax.contrib.muon) in place of a decomposition."
            ) from error
        if not isinstance(error, jax.errors.JaxRuntimeError):
            raise
        raise RuntimeError(f"{said}\n(while the step was traced and compiled for {target})") from error
    finally:
        logger.setLevel(before)
