"""The native library runs on every x86-64 processor: nothing beyond SSE2 before it has looked."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from daf_hf.kernels import cpu_status

STATUS = cpu_status()

LATER = re.compile(
    r"v(?!err|erw)\w+"  # AVX, AVX2, AVX-512, FMA, F16C
    r"|k(add|and|andn|mov|not|or|ortest|shiftl|shiftr|test|unpck|xnor|xor)[bwdq]+"
    r"|addsubp[sd]|h(add|sub)p[sd]|lddqu|mov(d|sh|sl)dup|fisttp\w*|monitor|mwait"  # SSE3
    r"|pabs[bwd]|palignr|ph(add|sub)(d|w|sw)|pmaddubsw|pmulhrsw|pshufb|psign[bwd]"  # SSSE3
    r"|p?blend\w+|dpp[sd]|extractps|insertps|movntdqa|mpsadbw|packusdw|pcmpeqq"  # SSE4.1
    r"|pextr[bdq]|phminposuw|pinsr[bdq]|p(max|min)(sb|sd|ud|uw)|pmov[sz]x\w+|pmuldq|pmulld"
    r"|ptest|rounds?[sp][sd]"
    r"|crc32\w*|pcmp[ei]str[im]|pcmpgtq|popcnt\w*"  # SSE4.2
    r"|aes\w+|pclmul\w+|sha(1|256)\w+|gf2p8\w+"
    r"|lzcnt\w*|tzcnt\w*|movbe\w*|andn[lq]?|bextr\w*|bls(i|r|msk)\w*|bzhi\w*|mulx\w*"
    r"|pdep[lq]?|pext[lq]?|rorx\w*|sarx\w*|shlx\w*|shrx\w*|adcx\w*|adox\w*|rdrand\w*|rdseed\w*"
)


def functions(library: str) -> dict[str, set[str]]:
    """Instructions of each function."""
    listing = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", library],
        check=True,
        capture_output=True,
        encoding="utf-8",
    ).stdout
    found = {}
    for block in listing.split("\n\n"):
        header, *lines = block.splitlines()
        name = re.fullmatch(r"\w+ <(.*)>:", header)
        if name:
            fields = [line.split("\t") for line in lines]
            found[name[1]] = {words[1].split()[0] for words in fields if len(words) > 1}
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="is about x86-64")
@pytest.mark.skipif(not STATUS.available, reason="the native backend was not built")
@pytest.mark.skipif(not shutil.which("objdump"), reason="there is no objdump (binutils)")
def test_only_the_kernels_for_later_processors_use_later_instructions():
    found = functions(str(STATUS.path))
    kernels = {
        isa: {name: used for name, used in found.items() if f"daf::{isa}::" in name}
        for isa in ("avx512vbmi", "avx512", "avx2", "baseline")
    }
    if not kernels["baseline"]:
        pytest.skip("the library was stripped of its functions' names")
    for isa in ("avx512vbmi", "avx512", "avx2"):  # what is looked for would be found
        assert any(LATER.fullmatch(used) for used in set().union(*kernels[isa].values()))
    later = {
        name: sorted(filter(LATER.fullmatch, used))
        for name, used in found.items()
        if not re.search(r"daf::avx(512vbmi|512|2)::", name)
    }
    assert not {name: used for name, used in later.items() if used}
