"""Compilation ahead of time: what is read from the assembly of a kernel."""

from benchmarks.kernel_tools.compilation import half_width, read_widths


def test_widths_of_accesses_are_those_of_the_assembly() -> None:
    ptx = """
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.L1::evict_first.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];
        ld.global.b64 { %rd9 }, [ %rd4 + 0 ];
        cp.async.cg.shared.global [ %r5 + 0 ], [ %rd6 + 0 ], 0x10, %r7;
        st.global.b16 [ %rd7 + 0 ], { %rs1 };
        @%p1 st.global.v8.b32 [ %rd8 + 0 ], { %r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8 };
    """
    amd = "global_load_dwordx4 v[2:5], v1, off\nbuffer_load_ushort v3, v4, s[0:3], 0\nglobal_store_dwordx2 v1, v[2:3], off"
    assert sorted(read_widths(ptx, "", "load")) == [8, 16, 16, 16]
    assert sorted(read_widths(ptx, "%1 = tt.load %0 : !tt.ptr<i64>", "load")) == [16, 16, 16]
    assert sorted(read_widths(ptx, "", "store")) == [2, 32]
    assert (read_widths(amd, "", "load"), read_widths(amd, "", "store")) == ([16, 2], [8])
    assert [half_width(widths) for widths in ([], [4] * 4 + [16], [4] * 5 + [16], [2, 2, 16, 16])] == [0, 16, 4, 16]
