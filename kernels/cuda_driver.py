"""NVIDIA's driver, bound with ctypes: modules are loaded and kernels launched through it."""

from __future__ import annotations

import ctypes

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS = 75, 76, 16  # CUdevice_attribute


class CudaError(RuntimeError):
    """A call of the driver failed; the message holds the error's name."""


class Driver:
    """The driver's library.

    Args:
        path: the library's path, or the name that the system's loader finds it by.

    Attributes:
        version: the newest CUDA version that it serves, such as (12, 6).

    Raises:
        OSError: there is no such library.
        CudaError: it finds no device, or cannot be initialised.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(path)
        self.call("cuInit", 0)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = (version.value // 1000, version.value % 1000 // 10)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver.

        Raises:
            CudaError: it failed.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


class Device:
    """One device, in the primary context that torch uses too.

    Args:
        driver: the driver.
        ordinal: the device's number.

    Attributes:
        capability: such as 87 for sm_87.
        multiprocessors: how many it has.

    Raises:
        CudaError: there is no such device.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        handle = ctypes.c_int()
        driver.call("cuDeviceGet", ctypes.byref(handle), ordinal)
        self._handle = handle

        def attribute(number: int) -> int:
            value = ctypes.c_int()
            driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
            return value.value

        self.capability = 10 * attribute(_CAPABILITY_MAJOR) + attribute(_CAPABILITY_MINOR)
        self.multiprocessors = attribute(_MULTIPROCESSORS)
        self._context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def __enter__(self) -> Device:
        """Makes its context the thread's."""
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class Module:
    """Kernels on a device.

    Args:
        driver: the driver.
        device: where they run.
        image: a cubin for its capability.

    Raises:
        CudaError: the driver does not take the image.
    """

    def __init__(self, driver: Driver, device: Device, image: bytes) -> None:
        self.device = device
        self._driver = driver
        self._handle = ctypes.c_void_p()
        self._kernels: dict[str, ctypes.c_void_p] = {}
        with device:
            driver.call("cuModuleLoadData", ctypes.byref(self._handle), ctypes.c_char_p(image))

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        argument: ctypes.Structure,
        stream: int,
    ) -> None:
        """Start a kernel that takes one structure.

        Args:
            kernel: its name.
            grid: blocks in x and y.
            threads: threads of a block.
            shared_bytes: dynamic shared memory of a block.
            argument: the structure; copied before this returns.
            stream: handle of the stream.

        Raises:
            CudaError: there is no such kernel, or it cannot be launched so; also where an
                earlier kernel failed.
        """
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        stream_handle = ctypes.c_void_p(stream)
        with self.device:
            self._driver.call(
                "cuLaunchKernel", self._kernel(kernel), *grid, 1, threads, 1, 1, shared_bytes,
                stream_handle, parameters, None,
            )  # fmt: skip

    def _kernel(self, name: str) -> ctypes.c_void_p:
        if name not in self._kernels:
            handle = ctypes.c_void_p()
            self._driver.call(
                "cuModuleGetFunction", ctypes.byref(handle), self._handle, name.encode()
            )
            self._kernels[name] = handle
        return self._kernels[name]
