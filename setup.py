"""Builds the native CPU backend, where GCC or Clang is at hand; pyproject.toml has the rest."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = "daf_hf/kernels/native"

native = Extension(
    "daf_hf.kernels._native",
    sources=[f"{NATIVE}/library.cpp"],
    depends=[str(path) for path in sorted(Path(NATIVE).glob("*.[hi]*"))],
    language="c++",
    # Backends agree bit for bit: no contraction into fused multiply-adds, no -ffast-math.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    optional=True,  # without it daf_hf falls back to its plain-torch backend
)

setup(ext_modules=[native])
