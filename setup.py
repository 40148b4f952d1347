"""Builds the native CPU backend, where a C++17 compiler is at hand; pyproject.toml has the rest."""

import sys

from setuptools import Extension, setup

NATIVE = "daf_hf/kernels/native"

native = Extension(
    "daf_hf.kernels._native",
    sources=[f"{NATIVE}/library.cpp"],
    depends=[f"{NATIVE}/{name}" for name in ("abi.h", "codec.inc", "common.h", "parallel.h", "parallel.inc")],
    language="c++",
    # Backends agree bit for bit: no contraction into fused multiply-adds, no -ffast-math.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
    ]
    if sys.platform != "win32"
    else ["/std:c++17", "/O2", "/fp:precise"],
    extra_link_args=["-pthread"] if sys.platform == "linux" else [],
    optional=True,  # without it daf_hf falls back to its plain-torch backend
)

setup(ext_modules=[native])
