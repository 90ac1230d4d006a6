#pragma once

// Internal. One binary for every x86-64 machine: a function marked with this is compiled for
// several vector widths, and the machine picks one when the library is loaded. LOCKSTEP_FMA_CLONES
// is for functions with fused multiply-add: on machines without it each goes to the C library, with
// the same result. LOCKSTEP_COMPILES_FMA: whether such a function is compiled for it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define LOCKSTEP_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#define LOCKSTEP_FMA_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define LOCKSTEP_COMPILES_FMA 1
#else
#define LOCKSTEP_VECTOR_CLONES
#define LOCKSTEP_FMA_CLONES
#if defined(__x86_64__) && !defined(__FMA__)
#define LOCKSTEP_COMPILES_FMA 0
#else
#define LOCKSTEP_COMPILES_FMA 1
#endif
#endif
