/* The compiler of kernels that torch writes at run time (prod, for one), without which it ends the process: their code is one byte long. */
#include <stddef.h>
#define API __attribute__((visibility("default")))
API int nvrtcCreateProgram(void **made) { return *made = (void *)16, 0; }
API int nvrtcDestroyProgram(void **made) { return (void)made, 0; }
API int nvrtcAddNameExpression(void) { return 0; }
API int nvrtcCompileProgram(void) { return 0; }
API int nvrtcGetCUBINSize(void *program, size_t *size) { return (void)program, *size = 1, 0; }
API int nvrtcGetCUBIN(void *program, char *code) { return (void)program, *code = 0; }
API int nvrtcGetPTXSize(void *program, size_t *size) { return (void)program, *size = 1, 0; }
API int nvrtcGetPTX(void *program, char *code) { return (void)program, *code = 0; }
API int nvrtcGetProgramLogSize(void *program, size_t *size) { return (void)program, *size = 1, 0; }
API int nvrtcGetProgramLog(void *program, char *log) { return (void)program, *log = 0; }
API int nvrtcGetLoweredName(void *program, const char *wanted, const char **name) { return (void)program, (void)wanted, *name = "", 0; }
API const char *nvrtcGetErrorString(int status) { return status ? "not supported by the simulated device" : "no error"; }
API int nvrtcVersion(int *one, int *two) { return *one = 13, *two = 0; }
