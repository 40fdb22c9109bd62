# Toolchain of `make portable`: zig (pip install ziglang) compiles for Macs with Apple's processors. What it makes is not run.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_SYSROOT "")  # zig has headers of its own
find_program(ZIG python-zig REQUIRED)
set(CMAKE_CXX_COMPILER ${ZIG})
set(CMAKE_CXX_COMPILER_ARG1 "c++ -target aarch64-macos")
# zig takes the name of a processor where other compilers take that of an architecture.
set(neon_dot_flags "-mcpu=generic+v8_2a+dotprod" CACHE STRING "")
set(neon_bf16_flags "-mcpu=generic+v8_2a+dotprod+bf16+i8mm+fullfp16+fp16fml" CACHE STRING "")
set(CMAKE_CXX_ARCHIVE_CREATE "python-zig ar qc <TARGET> <OBJECTS>")  # in the form that Macs' linkers read
set(CMAKE_CXX_ARCHIVE_FINISH "")
# Read once more after CMake's own rules for Macs: zig's linker crashes on bundles, and Python loads libraries as well.
set(CMAKE_USER_MAKE_RULES_OVERRIDE "${CMAKE_CURRENT_LIST_FILE}")
set(CMAKE_SHARED_MODULE_CREATE_CXX_FLAGS "-dynamiclib")
