// Of the native tests.
#pragma once

#include <cuda_runtime.h>
