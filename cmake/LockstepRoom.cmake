# One room of the design: a folder, a shared library, a target lockstep::<name>.
#
#   lockstep_room(NAME
#     SUBROOMS <folders>  folders of the room whose headers are included without the folder's name
#     PURE <sources>      sources that need no libtorch. They also form the static library
#                         lockstep_<name>_pure, which pure tests and fuzzers link.
#     SOURCES <sources>   sources that use libtorch
#     HEADERS <headers>   the installed headers
#     DEPS <rooms>        the rooms that this one may include
#     PURE_LIBS <libs>    libraries of the pure sources)
function(lockstep_room name)
  cmake_parse_arguments(arg "" "" "SUBROOMS;PURE;SOURCES;HEADERS;DEPS;PURE_LIBS" ${ARGN})
  set(room lockstep_${name})
  lockstep_link_headers(${name} ${arg_SUBROOMS})

  add_library(${room} SHARED ${arg_SOURCES})
  add_library(lockstep::${name} ALIAS ${room})
  set_target_properties(${room} PROPERTIES EXPORT_NAME ${name} DEFINE_SYMBOL "")
  target_include_directories(${room} PUBLIC
    "$<BUILD_INTERFACE:${LOCKSTEP_INCLUDE_DIR}>" "$<BUILD_INTERFACE:${LOCKSTEP_GENERATED_DIR}>"
    "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  target_link_libraries(${room} PUBLIC lockstep::torch)
  lockstep_no_undefined(${room})
  foreach(dep IN LISTS arg_DEPS)
    target_link_libraries(${room} PUBLIC lockstep_${dep})
  endforeach()
  lockstep_precompile(${room})
  lockstep_unity(${room} 8)

  if(arg_PURE)
    add_library(${room}_pure STATIC ${arg_PURE})
    lockstep_pure_includes(${room}_pure)
    lockstep_unity(${room}_pure 8)
    target_link_libraries(${room}_pure PUBLIC ${arg_PURE_LIBS})
    foreach(dep IN LISTS arg_DEPS)
      if(TARGET lockstep_${dep}_pure)
        target_link_libraries(${room}_pure PUBLIC lockstep_${dep}_pure)
      endif()
    endforeach()
    target_sources(${room} PRIVATE $<TARGET_OBJECTS:${room}_pure>)
    target_link_libraries(${room} PRIVATE ${arg_PURE_LIBS})
  endif()

  install(TARGETS ${room} EXPORT LockstepTargets)
  foreach(header IN LISTS arg_HEADERS)
    set(folder "${CMAKE_INSTALL_INCLUDEDIR}/lockstep/${name}")
    cmake_path(GET header PARENT_PATH below)
    # Generated headers, and those of sub-rooms, are placed directly in the room.
    if(NOT IS_ABSOLUTE "${header}" AND NOT below IN_LIST arg_SUBROOMS)
      cmake_path(APPEND folder "${below}")
    endif()
    install(FILES "${header}" DESTINATION "${folder}")
    cmake_path(ABSOLUTE_PATH header)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_PUBLIC_HEADERS "${header}")
  endforeach()
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ROOMS ${name})
endfunction()

# Builds the sources of a room that use CUDA as a separate library, liblockstep_<name>_cuda.so. A
# process loads it if there is a driver: see core/base/cuda_libraries.h.
function(lockstep_cuda_part name)
  set(part lockstep_${name}_cuda)
  add_library(${part} MODULE ${ARGN})
  target_link_libraries(${part} PRIVATE lockstep_${name} lockstep::torch_cuda)
  lockstep_no_undefined(${part})
  lockstep_unity(${part} 8)
  lockstep_loaded_part(${part})
endfunction()

# Installs a library that no program links: the rooms load it when they need it.
function(lockstep_loaded_part part)
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_LOADED_PARTS ${part})
  install(TARGETS ${part} LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endfunction()

# Programs that load such libraries must find them.
function(lockstep_needs_loaded_parts target)
  get_property(parts GLOBAL PROPERTY LOCKSTEP_LOADED_PARTS)
  if(parts)
    add_dependencies(${target} ${parts})
  endif()
endfunction()

# Makes "lockstep/<room>/<header>" resolve to the headers of a room and of the given sub-rooms.
function(lockstep_link_headers room)
  set(folder "${LOCKSTEP_INCLUDE_DIR}/lockstep/${room}")
  if(NOT ARGN)
    file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}" "${folder}" SYMBOLIC)
    return()
  endif()
  if(IS_SYMLINK "${folder}")  # left from when the room had no sub-rooms
    file(REMOVE "${folder}")
  endif()
  file(MAKE_DIRECTORY "${folder}")
  file(GLOB links LIST_DIRECTORIES false "${folder}/*.h")
  foreach(link IN LISTS links)
    file(READ_SYMLINK "${link}" header)
    cmake_path(IS_PREFIX CMAKE_CURRENT_SOURCE_DIR "${header}" ours)
    # Its header was removed or moved to another sub-room, or is that of the tree that was copied.
    if(NOT EXISTS "${link}" OR NOT ours)
      file(REMOVE "${link}")
    endif()
  endforeach()
  foreach(subroom IN LISTS ARGN ITEMS .)
    file(GLOB headers CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${subroom}/*.h"
         "${CMAKE_CURRENT_SOURCE_DIR}/${subroom}/*.cuh")
    foreach(header IN LISTS headers)
      cmake_path(GET header FILENAME name)
      file(CREATE_LINK "${header}" "${folder}/${name}" SYMBOLIC)
    endforeach()
  endforeach()
endfunction()

# The includes of a target that must not see libtorch: our headers, and only fmt from the wheel.
function(lockstep_pure_includes target)
  target_include_directories(${target} PUBLIC
    "${LOCKSTEP_INCLUDE_DIR}" "${LOCKSTEP_GENERATED_DIR}")
  target_link_libraries(${target} PUBLIC lockstep_fmt)
endfunction()

# All targets that use libtorch share one precompiled header.
function(lockstep_precompile target)
  if(LOCKSTEP_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM lockstep_precompiled)
  endif()
endfunction()

# A library must link all that it uses. A sanitizer's runtime is the exception: clang links it into
# programs only.
function(lockstep_no_undefined target)
  if(NOT (LOCKSTEP_SANITIZE AND CMAKE_CXX_COMPILER_ID MATCHES "Clang"))
    target_link_options(${target} PRIVATE "LINKER:-z,defs")
  endif()
endfunction()

# Compiles the sources of a target in batches of `batch` (0: all in one): libtorch's headers take
# longer to compile than most sources.
function(lockstep_unity target batch)
  set_target_properties(${target} PROPERTIES
    UNITY_BUILD ${LOCKSTEP_UNITY} UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()
