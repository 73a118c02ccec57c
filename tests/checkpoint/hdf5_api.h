// HDF5's own API, for tests that look at files from outside or plant something in them.
#pragma once

#include <hdf5.h>
