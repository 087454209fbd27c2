/* A driver without a device, for machines without NVIDIA's: what PyTorch calls before it needs one. */
enum { SUCCESS = 0, NO_DEVICE = 100 };

int cuInit(unsigned flags) { return NO_DEVICE; }

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return SUCCESS;
}

int cuDeviceGetCount(int *count) {
  *count = 0;
  return NO_DEVICE;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 0;
  return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
  *text = "no device";
  return SUCCESS;
}

int cuGetErrorName(int error, const char **text) {
  *text = "no device";
  return SUCCESS;
}
