# oracle_check DIR: the model against the fp64 oracle's cases. Registered on this repository's own copies of some; the
# whole folder is run by hand.
add_executable(oracle_check oracle_check.cpp)
target_link_libraries(oracle_check PRIVATE annulus_train nlohmann_json::nlohmann_json ${HDF5_C_LIBRARIES})
target_include_directories(oracle_check PRIVATE ${HDF5_C_INCLUDE_DIRS})

add_dependencies(gpu_tests oracle_check annulus)

set(ORACLE_CASES ${CMAKE_CURRENT_SOURCE_DIR}/oracle)
foreach(precision fp64 fp32)
  foreach(ranks 1 2 3 4)
    add_test(NAME oracle_${precision}_${ranks}
             COMMAND ${RUN_MPI} -np ${ranks} $<TARGET_FILE:oracle_check> ${ORACLE_CASES} --precision ${precision})
    set_tests_properties(oracle_${precision}_${ranks} PROPERTIES TIMEOUT 120 PROCESSORS 2 ENVIRONMENT "${MPI_ENVIRONMENT}")
  endforeach()
endforeach()
foreach(layout zigzag contiguous)
  add_test(NAME oracle_fp64_2x2_${layout}
           COMMAND ${RUN_MPI} -np 4 $<TARGET_FILE:oracle_check> ${ORACLE_CASES} --data 2 --layout ${layout})
  set_tests_properties(oracle_fp64_2x2_${layout} PROPERTIES TIMEOUT 120 PROCESSORS 2 ENVIRONMENT "${MPI_ENVIRONMENT}")
endforeach()

if(ANNULUS_CUDA)
  foreach(precision fp32 bf16)
    foreach(ranks 1 2)
      add_test(NAME oracle_cuda_${precision}_${ranks}
               COMMAND ${RUN_MPI} -np ${ranks} $<TARGET_FILE:oracle_check> ${ORACLE_CASES} --device cuda --precision ${precision})
      set_tests_properties(oracle_cuda_${precision}_${ranks} PROPERTIES TIMEOUT 120 LABELS gpu SKIP_RETURN_CODE 77
                           ENVIRONMENT "${MPI_ENVIRONMENT}")
    endforeach()
  endforeach()
endif()

if(ANNULUS_CUDA AND "90a" IN_LIST ANNULUS_CUDA_ARCHITECTURES)
  add_test(NAME compiler_report COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/program/compiler_report_test.sh ${CMAKE_BINARY_DIR})
  set_tests_properties(compiler_report PROPERTIES TIMEOUT 300 PROCESSORS 2 LABELS compiler SKIP_RETURN_CODE 77)
endif()

# program/<name>_test.sh PROGRAM [CONFIGS]: the whole program, under mpirun and alone, as people run it. Wall time is
# that of starting some hundred small jobs.
foreach(name cli equal_runs resume crash_save signals bad_input full_disk evaluate prepare uptrain convert generate)
  add_test(NAME program_${name}
           COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/program/${name}_test.sh $<TARGET_FILE:annulus> ${CMAKE_SOURCE_DIR}/configs)
  set_tests_properties(program_${name} PROPERTIES TIMEOUT 600 PROCESSORS 2 ENVIRONMENT "${MPI_ENVIRONMENT}")
endforeach()
