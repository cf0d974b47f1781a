/* cuBLAS, cuBLASLt, cuDNN and cuFFT, as far as torch needs an answer from them: handles, sizes and algorithms. Their kernels are never run.
 *
 * No header of theirs is included: what a function does with its arguments is little enough to write down here.
 */
#include <cudnn_version.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

int simulated_inside(void);
int simulated_refuse(const char *what);

/* Functions without results. A REFUSED one is an error; a LAUNCH is one too, except in an operator whose values are known (runtime.c). */
#define FINE(name) API int name(void) { return 0; }
#define REFUSED(name, status) API int name(void) { return simulated_refuse(#name), status; }
#define LAUNCH(name) API int name(void) { return simulated_inside() ? 0 : (simulated_refuse(#name), 14); }

FINE(cudaDeviceEnablePeerAccess) FINE(cudaProfilerStart) FINE(cudaProfilerStop)
FINE(cudaStreamDestroy)
FINE(cudaThreadExchangeStreamCaptureMode)
FINE(cudaFuncSetAttribute) FINE(cudaKernelSetAttributeForDevice) FINE(cuInit)

/* Handles and descriptors: memory of their own, which some callers write to. */
#define CREATE(name) API int name(void **made) { return *made = calloc(1, 256), 0; }
#define DESTROY(name) API int name(void *made) { return free(made), 0; }

/* Kernels that torch compiles at run time (nvrtc.c). */
API int cuModuleGetFunction(void **function, void *module, const char *name) { return (void)module, (void)name, *function = (void *)16, 0; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int block, size_t shared) {
    return (void)function, (void)block, (void)shared, *count = 1, 0;
}
FINE(cuModuleLoadData) FINE(cuModuleLoadDataEx) FINE(cuModuleUnload)
LAUNCH(cuLaunchKernel)

API int cublasGetMathMode(void *handle, int *mode) { return (void)handle, *mode = 0; }
API int cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, *mode = 0; }
API size_t cublasLtGetVersion(void) { return 130100; }
API int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *what, void *a, void *b, void *c, void *d, void *preference, int wanted, void *found, int *count
) {
    (void)handle, (void)what, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *count = wanted > 0;
    if (wanted > 0) memset(found, 0, 96); /* cublasLtMatmulHeuristicResult_t: an algorithm that succeeds and wants no workspace */
    return 0;
}

API size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
API int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? CUDNN_MAJOR : which == 1 ? CUDNN_MINOR : CUDNN_PATCHLEVEL, 0; }
API const char *cudnnGetErrorString(int status) { return status ? "not supported by the simulated device" : "CUDNN_STATUS_SUCCESS"; }
API void cudnnGetLastErrorString(char *text, size_t size) { snprintf(text, size, "not supported by the simulated device"); }
API int cudnnGetStream(void *handle, void **stream) { return (void)handle, *stream = NULL, 0; }

/* Convolutions: one algorithm for each (CUDNN_FMA_MATH), with the workspace that SIMULATED_CONVOLUTION_WORKSPACE says. */
static size_t convolution_workspace(void) {
    const char *text = getenv("SIMULATED_CONVOLUTION_WORKSPACE");
    return text ? strtoull(text, NULL, 10) : 0;
}
typedef struct { int algorithm, status; float time; size_t memory; int deterministic, math, reserved[3]; } Algorithm; /* cudnnConvolution…AlgoPerf_t */
static int algorithm(int *count, Algorithm *found) {
    *found = (Algorithm){.algorithm = 1, .time = 1, .memory = convolution_workspace(), .deterministic = 1, .math = 3};
    return *count = 1, 0;
}
#define CONVOLUTION(direction) \
    API int cudnnGetConvolution##direction##Algorithm_v7(void *h, void *a, void *b, void *c, void *d, int wanted, int *count, Algorithm *found) { \
        return (void)h, (void)a, (void)b, (void)c, (void)d, (void)wanted, algorithm(count, found); \
    } \
    API int cudnnFindConvolution##direction##AlgorithmEx( \
        void *h, void *a, void *a_at, void *b, void *b_at, void *c, void *d, void *d_at, int wanted, int *count, Algorithm *found, void *w, size_t size \
    ) { \
        (void)h, (void)a, (void)a_at, (void)b, (void)b_at, (void)c, (void)d, (void)d_at, (void)w, (void)size; \
        return (void)wanted, algorithm(count, found); \
    } \
    API int cudnnGetConvolution##direction##WorkspaceSize(void *h, void *a, void *b, void *c, void *d, int which, size_t *size) { \
        return (void)h, (void)a, (void)b, (void)c, (void)d, (void)which, *size = convolution_workspace(), 0; \
    }
CONVOLUTION(Forward)
CONVOLUTION(BackwardData)
CONVOLUTION(BackwardFilter)

API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *size) {
    return (void)h, (void)m, (void)o, (void)a, (void)x, *size = 0, 0;
}
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *b, void *a, size_t *size) {
    return (void)h, (void)m, (void)o, (void)x, (void)z, (void)y, (void)b, (void)a, *size = 0, 0;
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a, size_t *size
) {
    return (void)h, (void)m, (void)o, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)b, (void)a, *size = 0, 0;
}

#include "stubs.h" /* build.py writes it: whatever else this torch links */
