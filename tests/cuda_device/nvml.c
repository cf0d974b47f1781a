/* NVML, which torch asks before it uses expandable segments: there is no fabric between devices. */
#define API __attribute__((visibility("default")))
enum { NOT_SUPPORTED = 3 };
API int nvmlInit_v2(void) { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return (void)id, *device = (void *)16, 0; }
API int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return (void)device, (void)info, NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return (void)device, (void)link, (void)type, NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return (void)device, (void)link, (void)info, NOT_SUPPORTED; }
API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) { return (void)device, (void)infos, *count = 0, 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
