# Makes the imported targets lockstep::torch and lockstep::torch_cuda from a libtorch in the layout
# of the PyPI wheel. The build and the installed package use it. torch's own CMake files are not
# used, because they need a CUDA toolkit and hide the system's protobuf.
#
#   LOCKSTEP_TORCH_ROOT   the folder `torch` of the wheel. If it is not set: .venv of the source
#                         tree, then LOCKSTEP_TORCH_CANDIDATES, which the package sets, then the
#                         python3 in PATH. What was found is kept while it exists.
#   LOCKSTEP_TORCH_CUDA   also make lockstep::torch_cuda, for sources that use CUDA themselves (set
#                         by the build)
#
# Without a libtorch, the build ends with an error. In the package, which sets _lockstep_package,
# Lockstep_FOUND is FALSE then: the caller may do without Lockstep.
if(TARGET lockstep::torch)
  return()
endif()

set(LOCKSTEP_TORCH_VERSION "2.11.0")

# Sets LOCKSTEP_TORCH_ROOT, or `problem` in the caller.
function(_lockstep_find_torch problem)
  set(candidates ${LOCKSTEP_TORCH_ROOT})
  set(help "The folder torch of the wheel")
  get_property(known CACHE LOCKSTEP_TORCH_ROOT PROPERTY HELPSTRING)
  # An earlier configuration found it. A new -D has another help string: that folder is wanted.
  if(known STREQUAL help AND NOT EXISTS "${LOCKSTEP_TORCH_ROOT}/lib/libtorch_cpu.so")
    set(candidates)
  endif()
  if(NOT candidates)
    file(GLOB candidates
         "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../.venv/lib/python3*/site-packages/torch")
    list(APPEND candidates ${LOCKSTEP_TORCH_CANDIDATES})
    find_program(_lockstep_python3 python3 NO_CACHE)  # PATH may have another one the next time
    if(_lockstep_python3)
      execute_process(
        COMMAND "${_lockstep_python3}" -c
                "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
        OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      list(APPEND candidates ${found})
    endif()
  endif()
  foreach(candidate IN LISTS candidates)
    cmake_path(ABSOLUTE_PATH candidate NORMALIZE)
    if(EXISTS "${candidate}/lib/libtorch_cpu.so" AND EXISTS "${candidate}/version.py")
      file(STRINGS "${candidate}/version.py" line REGEX "^__version__ = ")
      string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" version "${line}")
      if(NOT version STREQUAL LOCKSTEP_TORCH_VERSION)
        string(CONCAT told "${candidate} holds torch ${version}; Lockstep is built and tested with "
                           "torch ${LOCKSTEP_TORCH_VERSION}.")
        set(${problem} "${told}" PARENT_SCOPE)
        return()
      endif()
      if(known AND NOT known STREQUAL help)  # asked for with -D, and still
        set(help "${known}")
      endif()
      set(LOCKSTEP_TORCH_ROOT "${candidate}" CACHE PATH "${help}" FORCE)
      return()
    endif()
  endforeach()
  list(JOIN candidates ", " places)
  set(${problem} "No libtorch found (looked in: ${places})." PARENT_SCOPE)
endfunction()

set(_lockstep_problem "")
_lockstep_find_torch(_lockstep_problem)
if(_lockstep_problem)
  string(CONCAT _lockstep_setting "set LOCKSTEP_TORCH_ROOT to the folder `torch` of a torch "
                                  "${LOCKSTEP_TORCH_VERSION} wheel.")
  if(NOT _lockstep_package)
    message(FATAL_ERROR "${_lockstep_problem} Run `make build`, which installs torch "
                        "${LOCKSTEP_TORCH_VERSION} into .venv, or ${_lockstep_setting}")
  endif()
  set(Lockstep_FOUND FALSE)
  string(CONCAT Lockstep_NOT_FOUND_MESSAGE
    "${_lockstep_problem} Install torch ${LOCKSTEP_TORCH_VERSION} with pip for the python3 in PATH, "
    "or ${_lockstep_setting}")
  return()
endif()

add_library(lockstep::torch INTERFACE IMPORTED GLOBAL)
cmake_path(GET LOCKSTEP_TORCH_ROOT PARENT_PATH _wheels)
string(APPEND _wheels "/nvidia")
target_include_directories(lockstep::torch SYSTEM INTERFACE
  "${LOCKSTEP_TORCH_ROOT}/include" "${LOCKSTEP_TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_features(lockstep::torch INTERFACE cxx_std_20)
target_compile_definitions(lockstep::torch INTERFACE
  USE_DISTRIBUTED USE_C10D_GLOO)
target_link_libraries(lockstep::torch INTERFACE
  "${LOCKSTEP_TORCH_ROOT}/lib/libtorch_cpu.so" "${LOCKSTEP_TORCH_ROOT}/lib/libc10.so")
if(LOCKSTEP_TORCH_CUDA)
  add_library(lockstep::torch_cuda INTERFACE IMPORTED GLOBAL)
  target_compile_definitions(lockstep::torch_cuda INTERFACE USE_C10D_NCCL)
  target_include_directories(lockstep::torch_cuda SYSTEM INTERFACE
    "${_wheels}/cu13/include" "${_wheels}/nccl/include")
  # Keep the library for its registrations, even if a program uses no symbol of it.
  target_link_options(lockstep::torch_cuda INTERFACE "LINKER:--no-as-needed")
  target_link_libraries(lockstep::torch_cuda INTERFACE lockstep::torch
    "${LOCKSTEP_TORCH_ROOT}/lib/libtorch_cuda.so" "${LOCKSTEP_TORCH_ROOT}/lib/libc10_cuda.so"
    "${_wheels}/cu13/lib/libcudart.so.13")
endif()
