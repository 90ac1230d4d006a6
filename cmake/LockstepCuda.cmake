# Decides whether the CUDA sources are built: LOCKSTEP_CUDA = AUTO (if a CUDA 13 compiler is found),
# ON (an error if there is none), OFF. Sets LOCKSTEP_WITH_CUDA. Unless CMAKE_CUDA_ARCHITECTURES is
# given, the kernels are built for the data-center GPUs and the newest consumer ones that nvcc knows
# (A100, H100, B200, RTX 50), and as PTX for later ones.
set(LOCKSTEP_CUDA AUTO CACHE STRING "Build the CUDA sources: AUTO, ON or OFF")
set_property(CACHE LOCKSTEP_CUDA PROPERTY STRINGS AUTO ON OFF)
set(LOCKSTEP_WITH_CUDA OFF)

if(NOT LOCKSTEP_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LOCKSTEP_CUDA: found ${LOCKSTEP_CUDA}, allowed: AUTO, ON, OFF")
endif()

# For find_program: accepts a compiler of CUDA 13, which this libtorch needs.
function(_lockstep_is_cuda_13 accepted nvcc)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(NOT version MATCHES "release 13\\.")
    set(${accepted} FALSE PARENT_SCOPE)
  endif()
endfunction()

if(NOT LOCKSTEP_CUDA STREQUAL "OFF")
  set(_field LOCKSTEP_NVCC)
  get_property(_type CACHE LOCKSTEP_NVCC PROPERTY TYPE)
  if(CMAKE_CUDA_COMPILER AND NOT LOCKSTEP_NVCC)
    set(_field CMAKE_CUDA_COMPILER)
    get_property(_type CACHE CMAKE_CUDA_COMPILER PROPERTY TYPE)
  endif()
  if(${_field})  # find_program would keep it unchecked
    get_filename_component(_nvcc "${${_field}}" PROGRAM)  # the path of a bare name
    set(_accepted TRUE)
    _lockstep_is_cuda_13(_accepted "${_nvcc}")
    if(_accepted)
      set(LOCKSTEP_NVCC "${_nvcc}" CACHE FILEPATH "nvcc of CUDA 13" FORCE)
    elseif(_type STREQUAL "FILEPATH")  # found by an earlier configuration
      unset(LOCKSTEP_NVCC CACHE)
    else()
      message(FATAL_ERROR "${_field}: found ${${_field}}, allowed: an nvcc of CUDA 13")
    endif()
  endif()
  file(GLOB _wheel_nvcc "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13/bin")
  find_program(LOCKSTEP_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda/bin ${_wheel_nvcc}
               PATH_SUFFIXES bin VALIDATOR _lockstep_is_cuda_13)
  set(_reason "no nvcc of CUDA 13 was found")
  if(LOCKSTEP_NVCC)
    set(LOCKSTEP_WITH_CUDA ON)
    get_filename_component(_found "${CMAKE_CUDA_COMPILER}" PROGRAM)
    get_filename_component(_found "${_found}" REALPATH)
    get_filename_component(_allowed "${LOCKSTEP_NVCC}" REALPATH)
    if(CMAKE_CUDA_COMPILER AND NOT _found STREQUAL _allowed)
      message(FATAL_ERROR
        "CMAKE_CUDA_COMPILER: found ${CMAKE_CUDA_COMPILER}, allowed: ${LOCKSTEP_NVCC}, which is "
        "LOCKSTEP_NVCC. CMake cannot change the compiler of a configured folder: configure with "
        "--fresh (make: remove .configure in the build folder).")
    endif()
    if(NOT IS_ABSOLUTE "${CMAKE_CUDA_COMPILER}")
      set(CMAKE_CUDA_COMPILER "${LOCKSTEP_NVCC}" CACHE FILEPATH "nvcc" FORCE)
    endif()
    execute_process(COMMAND "${LOCKSTEP_NVCC}" --list-gpu-arch OUTPUT_VARIABLE _known)
    set(_architectures)
    foreach(_architecture IN ITEMS 80 90 100 120)
      if(_known MATCHES "compute_${_architecture}\n")
        list(APPEND _architectures ${_architecture}-real)
        set(_newest ${_architecture})
      endif()
    endforeach()
    set(CMAKE_CUDA_ARCHITECTURES "${_architectures};${_newest}-virtual"
        CACHE STRING "GPU architectures of our kernels")
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_RUNTIME_LIBRARY None)
    enable_language(CUDA)
    # For line numbers in profilers and compute-sanitizer; the machine code is the same.
    add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>")
  elseif(LOCKSTEP_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "LOCKSTEP_CUDA=ON, but ${_reason}. `make build LOCKSTEP_CUDA=ON` installs one into .venv.")
  else()
    message(STATUS "Building without CUDA: ${_reason}")
  endif()
endif()
set(LOCKSTEP_TORCH_CUDA ${LOCKSTEP_WITH_CUDA})
