#include "mpi/heap_count_test.cpp"  // the same count for this program
