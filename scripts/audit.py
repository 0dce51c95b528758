"""Known vulnerabilities of the installed packages (pip-audit); passes, and says so, where no index can be reached."""

import json
import subprocess
import sys


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner=off", "--format=json"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        print(f"not checked: {reason}")
        return 0
    found = [(package, vulnerability) for package in packages for vulnerability in package.get("vulns", ())]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no release yet"
        print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
    print(f"{len(packages)} packages checked, {len(found)} known vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
