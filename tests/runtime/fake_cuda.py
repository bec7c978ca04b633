"""A stand-in for the CUDA libraries, so that the runtime's CUDA provider loads on machines without a GPU.

Every function that the provider imports exists and does nothing, but for memory, which is the host's. No kernel can
run, but all that happens when a session is made is real: parsing of options, placement of nodes, copies that are put
in, rewrites for CUDA, and the decision whether a model can be recorded.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from ortmoe_cli.runtime.binaries import cuda_library, libraries

_ALLOCATE = "(void**p,size_t n){*p=aligned_alloc(256,(n+255)/256*256);return 0;}"
_MAKE = "(void**p){*p=malloc(64);return 0;}"
_REAL = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int*n){*n=1;return 0;}",
    "cudaGetDevice": "int cudaGetDevice(int*n){*n=0;return 0;}",
    "cudaMalloc": f"int cudaMalloc{_ALLOCATE}",
    "cudaMallocHost": f"int cudaMallocHost{_ALLOCATE}",
    "cudaHostAlloc": "int cudaHostAlloc(void**p,size_t n,unsigned f){*p=aligned_alloc(256,(n+255)/256*256);return 0;}",
    "cudaFree": "int cudaFree(void*p){free(p);return 0;}",
    "cudaFreeHost": "int cudaFreeHost(void*p){free(p);return 0;}",
    "cudaMemcpy": "int cudaMemcpy(void*d,const void*s,size_t n,int k){memcpy(d,s,n);return 0;}",
    "cudaMemcpyAsync": "int cudaMemcpyAsync(void*d,const void*s,size_t n,int k,void*q){memcpy(d,s,n);return 0;}",
    "cudaMemset": "int cudaMemset(void*d,int c,size_t n){memset(d,c,n);return 0;}",
    "cudaMemsetAsync": "int cudaMemsetAsync(void*d,int c,size_t n,void*q){memset(d,c,n);return 0;}",
    "cudaMemGetInfo": "int cudaMemGetInfo(size_t*f,size_t*t){*f=*t=(size_t)8<<30;return 0;}",
    "cudaDeviceGetAttribute": "int cudaDeviceGetAttribute(int*v,int a,int d)"
    "{*v=a==75?9:a==76?0:a==16?132:1024;return 0;}",
    "cudaGetDeviceProperties": "int cudaGetDeviceProperties(char*p,int d){memset(p,0,1000);strcpy(p,\"fake\");"
    "*(size_t*)(p+288)=(size_t)8<<30;return 0;}",
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int*v){*v=13000;return 0;}",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int*v){*v=13000;return 0;}",
    "cudaGetErrorString": "const char*cudaGetErrorString(int e){return \"fake\";}",
    "cudaGetErrorName": "const char*cudaGetErrorName(int e){return \"fake\";}",
    "__cudaRegisterFatBinary": "void**__cudaRegisterFatBinary(void*p){static void*x;return &x;}",
    **{
        name: f"int {name}{_MAKE}"
        for name in ("cudaStreamCreate", "cudaEventCreate", "cublasCreate_v2", "cublasLtCreate", "cudnnCreate")
    },
    **{
        name: f"int {name}(void**p,unsigned f){{*p=malloc(64);return 0;}}"
        for name in ("cudaStreamCreateWithFlags", "cudaEventCreateWithFlags")
    },
}  # fmt: skip
_UNVERSIONED = {"cu": "libcuda.so.1", "create": "libnvinfer.so.10", "get": "libnvinfer.so.10"}
_VENDOR = ("libcu", "libnv")


def build(folder: Path) -> str | None:
    """Build the libraries. Returns why that is impossible, or None."""
    if sys.platform != "linux" or cuda_library() is None:
        return "the installed runtime has no CUDA provider for Linux"
    if not all(shutil.which(tool) for tool in ("gcc", "nm", "readelf")):
        return "gcc and binutils are needed to build a stand-in for the CUDA libraries"
    wanted: dict[str, set[str]] = defaultdict(set)
    for library in libraries():
        if "providers_cuda" in library.name or "providers_tensorrt" in library.name:
            _imports(library, wanted)
    for name, symbols in wanted.items():
        _compile(folder, name, sorted(symbols))
    return None


def _imports(library: Path, wanted: dict[str, set[str]]) -> None:
    """What a library needs of the vendor's: names of libraries, and of the functions in them."""
    for line in _tool("readelf", "-d", str(library)):
        name = line.partition("[")[2].rstrip("]")
        if "NEEDED" in line and name.startswith(_VENDOR):
            wanted[name] |= set()
    for line in _tool("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)):
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        home = version or next((lib for start, lib in _UNVERSIONED.items() if name.startswith(start)), "")
        if kind == "U" and home.startswith(_VENDOR):
            wanted[home].add(name)


def _tool(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _compile(folder: Path, name: str, symbols: list[str]) -> None:
    source, versions = folder / "stand-in.c", folder / "stand-in.map"
    functions = [_REAL.get(symbol, f"long {symbol}(void){{return 0;}}") for symbol in symbols]
    source.write_text("#include <stdlib.h>\n#include <string.h>\nint nothing;\n" + "\n".join(functions))
    versions.write_text(f"{name} {{ global: *; }};\n")
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / name), str(source)]
    subprocess.run([*command, f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}"], check=True)


def run(folder: Path, program: str, *arguments: str) -> Any:
    """Run a program that prints JSON, with the stand-in. It must not end normally: the provider cannot be unloaded."""
    command = [sys.executable, "-c", f"{program}\nimport os, sys; sys.stdout.flush(); os._exit(0)", *arguments]
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
