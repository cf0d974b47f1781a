/* Stand-in for the compiler's own header, which no wheel that torch depends on ships. */
#ifndef SIMULATED_HOST_DEFINES_H
#define SIMULATED_HOST_DEFINES_H
#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __no_return__
#endif
