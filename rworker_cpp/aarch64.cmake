# Toolchain of `make arm`: Debian's g++-aarch64-linux-gnu compiles, and qemu runs what it made (QEMU_CPU: as which processor).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_EXE_LINKER_FLAGS_INIT -no-pie)  # qemu 7.2 breaks the heap of some that may lie anywhere
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
