output "cluster_id" {
  description = "ID of the Kubernetes cluster, for: nebius mk8s cluster get-credentials --external --id ID"
  value       = nebius_mk8s_v1_cluster.cluster.id
}

output "gpu_node_group_id" {
  description = "ID of the group of GPU nodes, for: nebius mk8s node-group get --id ID"
  value       = nebius_mk8s_v1_node_group.gpu.id
}

output "trial_arguments" {
  description = "Arguments of seatrial run for this cluster; with Kubernetes, add --set kubernetes.image=IMAGE"
  value = concat(
    ["--nodes", tostring(var.gpu_node_count), "--gpus-per-node", "8"],
    local.is_soperator ? ["--launcher", "slurm", "--set", "slurm.partition=main"] : [
      "--launcher", "kubernetes",
      # InfiniBand devices: Nebius has no resource for them, and pods that use them are privileged.
      "--set", "kubernetes.overlay.privileged=true",
      "--set", "kubernetes.overlay.run_as_user=0",
      "--set", "kubernetes.tolerations=[{\"key\":\"nvidia.com/gpu\",\"operator\":\"Exists\"},{\"key\":\"seatrial.dev/not-accepted\",\"operator\":\"Exists\"}]",
    ],
  )
}

output "shared_folder" {
  description = "Folder of the shared filesystem on all GPU nodes (with soperator: on all Slurm nodes), for run directories"
  value       = local.shared_folder
}

output "soperator_values" {
  description = "With scheduler soperator: the values of its charts, by chart, as JSON, which is YAML"
  value       = { for chart, values in local.soperator_values : chart => jsonencode(values) if local.is_soperator }
}

output "infiniband_topology" {
  description = "Switches between the nodes, by instance"
  value       = nebius_compute_v1_gpu_cluster.infiniband.status.infiniband_topology_path
}
