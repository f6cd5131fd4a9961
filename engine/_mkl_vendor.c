/* MKL asks `mkl_serv_intel_cpu_true` whether the processor is one of its maker's before it looks at
 * what the processor can do. Loaded globally before the library that holds MKL, this one is asked
 * instead, by the usual rules of dynamic linking. MKL still asks the processor itself for every set
 * of instructions. See mkl.py. */
int mkl_serv_intel_cpu_true(void) { return 1; }
