// HDF5's own API, for tests that look at files from outside or plant something in them.
#pragma once

#if __has_include(<hdf5.h>)
#include <hdf5.h>
#else
#include <hdf5/serial/hdf5.h>  // Debian, where only the store itself is given the include path
#endif
