// What a DLL needs of the static part of Visual C++'s runtime, in place of libcmt.lib: start-up, static initialisers,
// thread-local storage, stack cookies. The rest of the C runtime is Windows' own ucrtbase.dll.
typedef unsigned long long size_t;
typedef void(__cdecl* Procedure)();
typedef int(__cdecl* Function)();

extern "C" {
void* __cdecl malloc(size_t);
void __cdecl free(void*);
int __cdecl _initialize_onexit_table(void*);
int __cdecl _register_onexit_function(void*, Function);
int __cdecl _execute_onexit_table(void*);

#pragma section(".CRT$XIA", read)
#pragma section(".CRT$XIZ", read)
#pragma section(".CRT$XCA", read)
#pragma section(".CRT$XCZ", read)
__declspec(allocate(".CRT$XIA")) Function c_first[] = {nullptr};
__declspec(allocate(".CRT$XIZ")) Function c_last[] = {nullptr};
__declspec(allocate(".CRT$XCA")) Procedure cpp_first[] = {nullptr};
__declspec(allocate(".CRT$XCZ")) Procedure cpp_last[] = {nullptr};

static void* onexit_table[3];

int __cdecl atexit(Procedure procedure) {
    return _register_onexit_function(onexit_table, reinterpret_cast<Function>(procedure));
}

int __stdcall _DllMainCRTStartup(void*, unsigned long reason, void*) {
    const unsigned long process_attach = 1, process_detach = 0;
    if (reason == process_attach) {
        _initialize_onexit_table(onexit_table);
        for (Function* entry = c_first; entry < c_last; ++entry) {
            if (*entry != nullptr && (*entry)() != 0) {
                return 0;
            }
        }
        for (Procedure* entry = cpp_first; entry < cpp_last; ++entry) {
            if (*entry != nullptr) {
                (*entry)();
            }
        }
    } else if (reason == process_detach) {
        _execute_onexit_table(onexit_table);
    }
    return 1;
}

int _fltused = 0x9875;

// Stack cookies and Control Flow Guard, which cudart_static.lib is compiled with: present, and without effect.
size_t __security_cookie = 0x2B992DDFA232;
void __cdecl __security_check_cookie(size_t) {}
int __GSHandlerCheck(void*, void*, void*, void*) {
    return 1;  // ExceptionContinueSearch
}
static void guard_check() {}
__asm__(".text\nguard_dispatch: jmp rax");
void guard_dispatch();
void* __guard_check_icall_fptr = reinterpret_cast<void*>(guard_check);
void* __guard_dispatch_icall_fptr = reinterpret_cast<void*>(guard_dispatch);

// The thread-local storage directory.
unsigned _tls_index;
#pragma section(".tls", read, write)
#pragma section(".tls$ZZZ", read, write)
#pragma section(".CRT$XLA", read)
#pragma section(".CRT$XLZ", read)
__declspec(allocate(".tls")) char _tls_start = 0;
__declspec(allocate(".tls$ZZZ")) char _tls_end = 0;
__declspec(allocate(".CRT$XLA")) void* tls_callbacks_first = nullptr;
__declspec(allocate(".CRT$XLZ")) void* tls_callbacks_last = nullptr;
struct TlsDirectory {
    void *start, *end;
    unsigned* index;
    void** callbacks;
    unsigned zero_fill, flags;
};
extern const TlsDirectory _tls_used = {&_tls_start, &_tls_end, &_tls_index, &tls_callbacks_first + 1, 0, 0};

// Static variables of functions: the first thread constructs, the others wait for it.
void __stdcall AcquireSRWLockExclusive(void**);
void __stdcall ReleaseSRWLockExclusive(void**);
int __stdcall SleepConditionVariableSRW(void**, void**, unsigned long, unsigned long);
void __stdcall WakeAllConditionVariable(void**);

int _Init_global_epoch = -2147483647 - 1;
__declspec(thread) int _Init_thread_epoch = -2147483647 - 1;
static void* once_lock;
static void* once_done;
static const int being_constructed = -1;

static void finish_once(int* once, int value) {
    AcquireSRWLockExclusive(&once_lock);
    *once = value;
    _Init_thread_epoch = _Init_global_epoch;
    ReleaseSRWLockExclusive(&once_lock);
    WakeAllConditionVariable(&once_done);
}
void __cdecl _Init_thread_header(int* once) {
    AcquireSRWLockExclusive(&once_lock);
    while (*once == being_constructed) {
        SleepConditionVariableSRW(&once_done, &once_lock, 0xffffffff, 0);
    }
    if (*once == 0) {
        *once = being_constructed;
    } else {
        _Init_thread_epoch = _Init_global_epoch;
    }
    ReleaseSRWLockExclusive(&once_lock);
}
void __cdecl _Init_thread_footer(int* once) {
    finish_once(once, ++_Init_global_epoch);
}
void __cdecl _Init_thread_abort(int* once) {
    finish_once(once, 0);
}
}
