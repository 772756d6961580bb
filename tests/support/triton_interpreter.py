"""Import this before `engine.gpu`: the kernels then run in Triton's interpreter, on the CPU."""

from __future__ import annotations

from engine.gpu.interpreter import use_interpreter

use_interpreter()
