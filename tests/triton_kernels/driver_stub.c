/* A stand-in for libcuda.so.1: launches nothing, and refuses what a GPU's driver would refuse of a launch.

   cc -shared -fPIC -I <triton>/backends/nvidia/include -Wl,-soname,libcuda.so.1 -o libcuda.so.1 driver_stub.c
   It checks tensor maps by the rules of cuTensorMapEncodeTiled, grids, blocks, and shared memory ($STUB_SHARED bytes). */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

#define OK CUDA_SUCCESS
#define REFUSE(...) do { fprintf(stderr, "refused: " __VA_ARGS__); fputc('\n', stderr); return CUDA_ERROR_INVALID_VALUE; } while (0)

static int shared_limit(void) { const char *s = getenv("STUB_SHARED"); return s ? atoi(s) : 227 << 10; }
static int granted = 48 << 10;

CUresult cuGetErrorString(CUresult e, const char **text) { *text = e ? "refused by the stub" : "none"; return OK; }
CUresult cuInit(unsigned flags) { return OK; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return OK; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return OK; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? shared_limit()
         : which == CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK ? 65536
         : which == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132 : 1024;
  return OK;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return OK; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return OK; }
CUresult cuCtxSetCurrent(CUcontext context) { return OK; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return OK; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return OK; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return image ? OK : CUDA_ERROR_INVALID_VALUE; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)1; return OK; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return OK;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value > shared_limit()) REFUSE("%d bytes of shared memory", value);
    granted = value;
  }
  return OK;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return OK; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { *count = 1; return OK; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr pointer) { *(CUdeviceptr *)data = pointer; return OK; }
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *which, void **data, CUdeviceptr pointer) {
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *sizes,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  static const unsigned spans[] = {1 << 30, 32, 64, 128};
  if (rank < 1 || rank > 5) REFUSE("a tensor map of rank %u", rank);
  if ((size_t)base % 16) REFUSE("a tensor map at %p", base);
  for (unsigned i = 0; i < rank; i++) {
    if (!sizes[i] || sizes[i] > 1ull << 32) REFUSE("%llu entries in dimension %u", (unsigned long long)sizes[i], i);
    if (!box[i] || box[i] > 256) REFUSE("a box of %u", box[i]);
    if (!steps[i] || steps[i] > 8) REFUSE("steps of %u", steps[i]);
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40)) REFUSE("a stride of %llu", (unsigned long long)strides[i]);
  }
  if (type < 10 && swizzle < 4 && box[0] * bytes[type] > spans[swizzle]) REFUSE("an inner box of %u bytes", box[0] * bytes[type]);
  if (type < 10 && box[0] * bytes[type] % 16) REFUSE("an inner box of %u bytes", box[0] * bytes[type]);
  fprintf(stderr, "map\n");
  return OK;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **parameters, void **extra) {
  if (!c->gridDimX || c->gridDimX > 0x7fffffffu || c->gridDimY > 65535 || c->gridDimZ > 65535)
    REFUSE("a grid of %u x %u x %u", c->gridDimX, c->gridDimY, c->gridDimZ);
  if (c->blockDimX * c->blockDimY * c->blockDimZ > 1024) REFUSE("%u threads", c->blockDimX);
  if ((int)c->sharedMemBytes > granted) REFUSE("%u bytes of shared memory, of %d granted", c->sharedMemBytes, granted);
  if (!parameters && !extra) REFUSE("no parameters");
  fprintf(stderr, "launch\n");
  return OK;
}
