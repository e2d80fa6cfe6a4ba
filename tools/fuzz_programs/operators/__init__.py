"""The operators of random programs; importing this package fills the registry."""

from tools.fuzz_programs.operators import combining as combining
from tools.fuzz_programs.operators import control as control
from tools.fuzz_programs.operators import elementwise as elementwise
from tools.fuzz_programs.operators import images as images
from tools.fuzz_programs.operators import indexing as indexing
from tools.fuzz_programs.operators import moving as moving
